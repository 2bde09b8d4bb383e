{{/* The pod of one component. Takes (dict "root" $ "component" "router" | "prefill" | "decode" | "gateway"). */}}

{{- define "pdserve.podAddress" -}}
{{- eq .Values.ipFamily "IPv6" | ternary "[$(POD_IP)]" "$(POD_IP)" }}
{{- end }}

{{- define "pdserve.image" -}}
{{- $image := (index .root.Values .component).image }}
{{- printf "%s:%s" $image.repository ($image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion) }}
{{- end }}

{{- define "pdserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The compute threads of a worker are the cores that it is given; the kernel would tell it all of the node's. */}}
{{- define "pdserve.threads" -}}
{{- $settings := include "pdserve.settings" . | fromJson }}
{{- $resources := (index .root.Values .component).resources }}
{{- if not (dig "engine" "threads" 0 $settings) }}
{{- if dig "limits" "cpu" "" $resources }}limits.cpu
{{- else if dig "requests" "cpu" "" $resources }}requests.cpu
{{- end }}
{{- end }}
{{- end }}

{{- define "pdserve.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: PDSERVE_METRICS__LISTEN
  value: {{ printf "%s:9400" (include "pdserve.podAddress" .root) | quote }}
{{- if eq .component "router" }}
- name: PDSERVE_ROUTER__ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- else if ne .component "gateway" }}
- name: PDSERVE_WORKER__ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: PDSERVE_WORKER__KV_LISTEN
  value: {{ printf "%s:7777" (include "pdserve.podAddress" .root) | quote }}
{{- with include "pdserve.threads" . }}
- name: PDSERVE_ENGINE__THREADS
  valueFrom: {resourceFieldRef: {resource: {{ . }}, divisor: "1"}}
{{- end }}
{{- end }}
{{- if and .root.Values.model.fetch (ne .component "gateway") }}
- name: PDSERVE_CACHE_DIR
  value: /models
{{- end }}
{{- end }}

{{- define "pdserve.hasModels" -}}
{{- if or (has .component (list "prefill" "decode")) (and (eq .component "router") .root.Values.model.onRouters) }}
{{- if or .root.Values.model.fetch .root.Values.model.volume }}true{{ end }}
{{- end }}
{{- end }}

{{/* The Secrets that it reads, as (name of the volume, name of the Secret, key, file); a list as JSON. */}}
{{- define "pdserve.secrets" -}}
{{- $values := .root.Values }}
{{- $found := list }}
{{- if ne .component "gateway" }}
{{- $found = append $found (list "secret" (include "pdserve.clusterSecret" .root) $values.clusterSecret.key "secret") }}
{{- end }}
{{- if eq .component "router" }}
{{- if $values.apiKeys.existingSecret }}
{{- $found = append $found (list "keys" $values.apiKeys.existingSecret $values.apiKeys.key "keys.toml") }}
{{- end }}
{{- if $values.tls.clientAuthorities }}
{{- $found = append $found (list "client-authorities" $values.tls.clientAuthorities "ca.crt" "ca.crt") }}
{{- end }}
{{- end }}
{{- with index (dict "router" $values.tls.routers "gateway" $values.tls.gateways "prefill" $values.tls.workers "decode" $values.tls.workers) .component }}
{{- $found = append $found (list "tls" . "" "") }}
{{- end }}
{{- if and $values.tls.authorities (or (ne .component "router") $values.tls.workers) }}
{{- $found = append $found (list "authorities" $values.tls.authorities "ca.crt" "ca.crt") }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* Where a gateway finds routers that are ready; the name leads it to another one when its own is lost. */}}
{{- define "pdserve.gatewayArgs" -}}
- --target={{ include "pdserve.fullname" . }}.{{ .Release.Namespace }}.svc:{{ .Values.router.service.port }}
{{- if .Values.tls.routers }}
- --tls-ca=/etc/pdserve/authorities/ca.crt
- --tls-server-name={{ include "pdserve.serverName" . }}
{{- if .Values.tls.clientAuthorities }}
- --tls-cert=/etc/pdserve/tls/tls.crt
- --tls-key=/etc/pdserve/tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{- define "pdserve.pod" -}}
{{- $values := index .root.Values .component }}
{{- $secrets := include "pdserve.secrets" . | fromJsonArray }}
{{- $hasModels := include "pdserve.hasModels" . }}
metadata:
  labels:
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- include "pdserve.selectorLabels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  annotations:
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    checksum/config: {{ include "pdserve.toml" . | sha256sum }}
spec:
  serviceAccountName: {{ include "pdserve.serviceAccount" .root }}
  automountServiceAccountToken: false
  # Variables of Services would begin with PDSERVE_ too, and unknown settings are errors.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "pdserve.graceSeconds" . }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch # not each file of a model, at each start
    seccompProfile: {type: RuntimeDefault}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $hasModels .root.Values.model.fetch }}
  initContainers:
    - name: fetch
      image: {{ include "pdserve.image" . }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args: [fetch, {{ .root.Values.model.name | quote }}]
      env:
        - name: PDSERVE_CACHE_DIR
          value: /models
      securityContext:
        {{- include "pdserve.containerSecurity" . | nindent 8 }}
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models}
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "pdserve.image" . }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args:
        - {{ .component }}
        - --config=/etc/pdserve/config/pdserve.toml
        {{- if eq .component "gateway" }}
        {{- include "pdserve.gatewayArgs" .root | nindent 8 }}
        {{- end }}
      env:
        {{- include "pdserve.env" . | nindent 8 }}
      ports:
        {{- if eq .component "router" }}
        - {name: clients, containerPort: 50051}
        - {name: workers, containerPort: 50052}
        {{- if .root.Values.router.http }}
        - {name: http, containerPort: 8000}
        {{- end }}
        {{- else if eq .component "gateway" }}
        - {name: http, containerPort: 8000}
        {{- else }}
        - {name: links, containerPort: 7777}
        {{- end }}
        - {name: metrics, containerPort: 9400}
      # Loading a model, or waiting for a worker, is neither an unfinished start nor a failure: that is readiness.
      startupProbe:
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 5
        failureThreshold: {{ divf $values.startupSeconds 5 | ceil | int }}
      livenessProbe:
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        httpGet: {path: /readyz, port: metrics}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 2
      securityContext:
        {{- include "pdserve.containerSecurity" . | nindent 8 }}
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/pdserve/config, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- range $secrets }}
        - {name: {{ first . }}, mountPath: /etc/pdserve/{{ first . }}, readOnly: true}
        {{- end }}
        {{- if $hasModels }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "pdserve.fullname" .root }}
        items: [{key: {{ .component }}.toml, path: pdserve.toml}]
    # Sockets of links, scratch files: all that is written.
    - name: tmp
      emptyDir: {}
    {{- range $secrets }}
    - name: {{ first . }}
      secret:
        secretName: {{ index . 1 }}
        defaultMode: 0440
        {{- if index . 2 }}
        items: [{key: {{ index . 2 | quote }}, path: {{ last . }}}]
        {{- end }}
    {{- end }}
    {{- if $hasModels }}
    - name: models
      {{- toYaml (.root.Values.model.volume | default (dict "emptyDir" (dict))) | nindent 6 }}
    {{- end }}
{{- end }}
